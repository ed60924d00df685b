"""Measures step times on an engine, fits the cost model of the controller and the simulator, and checks the fit."""
