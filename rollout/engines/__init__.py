"""What generates: engines of one interface, which of them a run takes, and how coroutines share it."""
