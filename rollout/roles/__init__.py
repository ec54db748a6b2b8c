"""Who is asked by HTTP, or plays a script: simulated users and judges."""
