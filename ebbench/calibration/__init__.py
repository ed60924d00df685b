"""Measure step times on an engine, fit the controller's cost model, check the fit."""
