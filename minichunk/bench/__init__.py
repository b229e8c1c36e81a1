"""Measurements, one JSON a run: kernels, steps, serving, peers. Speed lives here, never in a timed test."""
