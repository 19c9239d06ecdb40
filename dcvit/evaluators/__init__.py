"""Evaluators; the `type` of one in a config is the name of a file here.

Each has a class `Evaluator(predict, mesh, **options)` whose `run(params)` gives a dict of numbers.
"""
