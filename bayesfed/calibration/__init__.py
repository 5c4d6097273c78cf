"""Calibration of a model together with its fit, and power, by simulated data sets: ``bf.calibrate``, ``bf.power``."""
