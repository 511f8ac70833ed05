"""Trainers behind one protocol (`base.TrainBackend`) and the order of one training step (`update.run_update`)."""
