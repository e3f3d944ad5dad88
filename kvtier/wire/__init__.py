"""The wire protocol: its versions, and conversions between messages and kvtier's types.

Client and daemon both import this package, and neither imports the other.
"""
