"""`slipstream broker init`: keys, certificates and configuration of a broker for real use, in one folder."""
