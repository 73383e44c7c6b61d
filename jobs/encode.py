"""Encode every planned image once, on the cluster.

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python jobs/encode.py s3://bucket/run --workers 16

The options are those of `ckn-scale encode`; submitted again, it goes on where it stopped.
"""

import sys

from ckn_scale.cli import main

if __name__ == "__main__":
    main(["encode", *sys.argv[1:], "--ray", "auto"])
