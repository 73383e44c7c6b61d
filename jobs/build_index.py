"""Build the index of what is encoded, certify it with planted queries, publish it.

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python jobs/build_index.py s3://bucket/run --workers 16

The options are those of `ckn-scale publish`; submitted again, it goes on where it stopped.
"""

import sys

from ckn_scale.cli import main

if __name__ == "__main__":
    main(["publish", *sys.argv[1:], "--ray", "auto"])
