"""Pictures for people: what the detector sees, what a network sees, what matches what."""
