"""The rollout side: prompts out of the data source, samples with rewards into the training batch."""
