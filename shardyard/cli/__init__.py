"""The command line: ``shardyard COMMAND``."""


def main() -> None:
    # Here and not above: a part of this package can be imported without all the others.
    from shardyard.cli.app import run

    run()
