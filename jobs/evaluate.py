"""Measure descriptors on a benchmark set that lies where the job runs.

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python jobs/evaluate.py images /data/holidays --protocol holidays --json /data/holidays.json

The options are those of `ckn-scale evaluate`.
"""

import sys

from ckn_scale.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
