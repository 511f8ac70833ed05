"""What trainer and engine share of vision-language models: positions of image tokens, and the two towers."""
