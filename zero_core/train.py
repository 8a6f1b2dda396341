"""``python -m zero_core.train RUN_DIRECTORY``: one rank of one attempt; torchrun starts it by this name."""

import sys

from zero_core.training.rank_output import mark_output

if __name__ == "__main__":
    mark_output()
    from zero_core.training.train import main

    sys.exit(main())
