"""What is stored: schemas, plans, manifests, the run directory."""
