"""The services: one folder a container; none imports another."""
