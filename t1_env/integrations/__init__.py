"""Other libraries, one file each. Nothing here is imported unless it is asked for."""
