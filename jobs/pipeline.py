"""The whole path as one Ray job: plan, sample, train, encode, build, certify, publish.

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python jobs/pipeline.py s3://bucket/photos s3://bucket/run --workers 16

The options are those of `ckn-scale index`; submitted again, it goes on where it stopped.
"""

import sys

from ckn_scale.cli import main

if __name__ == "__main__":
    main(["index", *sys.argv[1:], "--ray", "auto"])
