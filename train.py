"""`python train.py`: the synchronous loop, which is slime/loop.py."""

if __name__ == "__main__":
    import sys

    from slime.cli.train import main

    sys.exit(main())
else:
    from slime.loop import train  # noqa: F401 - for code that imports it from here
