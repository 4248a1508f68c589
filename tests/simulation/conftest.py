"""Property tests are judged by what they find, not by how long an example takes."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
