"""What holds for every test: a machine may be slow, so no property test fails for the time one example takes."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
