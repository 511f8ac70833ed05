"""Services that show curves and samples of a run: readers of its folder, each in a process of its own."""
