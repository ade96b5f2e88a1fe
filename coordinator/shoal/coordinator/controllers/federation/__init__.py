"""Trade with other regions: solicitations and awards as the origin, bids as the delegate, the ledger and the
membership. May import workloads, identity, fleet, documents and log.
"""
