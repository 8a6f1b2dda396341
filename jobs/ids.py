"""Public identifiers: OpenAI's prefixes, and 120 random bits that tell nothing and never collide."""

import secrets
import string

ALPHABET = string.ascii_letters + string.digits
LENGTH = 24


def new_id(prefix: str) -> str:
    """``file-``, ``ftjob-``, ``ftckpt_``, ``key-`` or ``team-`` and 24 letters and digits."""
    return prefix + "".join(secrets.choice(ALPHABET) for _ in range(LENGTH))
