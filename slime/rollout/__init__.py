"""The rollout stage: prompts out of the data source, samples with rewards into the training batch."""
