"""The wire: protocol versions, and conversions between messages and kvtier's own types.

Client and daemon both import this package, and neither imports the other.
"""
