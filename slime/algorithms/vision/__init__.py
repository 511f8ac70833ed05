"""Vision-language code shared by trainer and engine: positions of image tokens, and the vision towers."""
