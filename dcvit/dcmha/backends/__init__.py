"""Implementations of attention; `dcvit.dcmha.plan.BACKENDS` says when each is used."""
