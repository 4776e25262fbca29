"""kvmesh: what the members of the mesh have agreed on. A library: no main but the command line, no ports, no environment."""
