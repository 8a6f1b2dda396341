"""``python -m zero_core.train RUN_DIRECTORY``: one rank of one attempt; torchrun starts it by this name."""

import sys

from zero_core.training.train import main

if __name__ == "__main__":
    sys.exit(main())
