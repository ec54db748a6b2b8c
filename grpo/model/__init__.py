"""What is trained: the policy and the reference, the rows they read, and the weights that the engine gets."""
