"""The integer hash for reproducible pseudo-randomness: epoch orders and sampling seeds."""

_MASK = (1 << 64) - 1


def mix64(*values: int) -> int:
    """Mix integers into one well spread 64-bit number (splitmix64), the same on every machine."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
