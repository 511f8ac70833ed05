"""What a run keeps: checkpoints, rollouts in flight, exported models, and what a restart takes up again."""
