"""`python train_async.py`: the asynchronous loop, which is slime/loop_async.py."""

if __name__ == "__main__":
    import sys

    from slime.cli.train_async import main

    sys.exit(main())
else:
    from slime.loop_async import train  # noqa: F401 - for code that imports it from here
