"""The supervisor as it is, over ranks that only follow a script."""

from worker.launchers.torchrun import Torchrun
from worker.supervisor import main

if __name__ == "__main__":
    main(Torchrun(module="tests.worker.scripted_train"))
