"""Optimus (Peng et al., EuroSys'18), and the baselines of its evaluation: DRF and Tetris."""
