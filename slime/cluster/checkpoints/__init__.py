"""State that a run saves (checkpoints, rollouts in flight, exported models) and restores when it resumes."""
