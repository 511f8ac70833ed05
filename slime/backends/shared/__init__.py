"""What both trainers use: micro-batches, the optimizer, Hugging Face
folders, and copies of a model's weights.
"""
