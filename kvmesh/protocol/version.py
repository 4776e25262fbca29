"""The version of the protocol: members of one mesh speak the same."""

PROTOCOL_VERSION = 3
"""Rises with every change that a member of the version before would misread."""
