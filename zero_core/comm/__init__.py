"""How ranks exchange elements and words: groups, collectives, and the transports below them."""
