"""The commands people type: python -m launch.NAME, and the shell scripts beside them."""
