"""Pictures of prompts: read from whatever a row holds, and made into what models take."""
