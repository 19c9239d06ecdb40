"""Configs: loading and checking, their keys, and the translation of big_vision's files."""
