"""Programs that tests start collect garbage seldom: importing vLLM makes a million objects that
stay, and looking through them again and again takes a fifth of the time of the import."""

import gc

gc.set_threshold(100_000, 50, 100)
