"""Learn the models of a planned run on the cluster: sample, networks, projections, words, reduction.

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python jobs/train.py s3://bucket/run --workers 16

The options are those of `ckn-scale train`; submitted again, it goes on where it stopped.
"""

import sys

from ckn_scale.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:], "--ray", "auto"])
