"""Published measurements repeated on emulated devices, and how far off the results are."""
