"""Join tokens, certificates, renewal and revocation. May import fleet, documents and log."""
