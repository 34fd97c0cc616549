"""What compiled programs add to plans: tune=compile with its cache, and predictions from a calibration."""
