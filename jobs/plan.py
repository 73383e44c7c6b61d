"""List the images of a bucket, freeze the list and say what the run will take.

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python jobs/plan.py s3://bucket/photos s3://bucket/run

The options are those of `ckn-scale plan`.
"""

import sys

from ckn_scale.cli import main

if __name__ == "__main__":
    main(["plan", *sys.argv[1:], "--ray", "auto"])
