"""KV pages from one process's memory into another's.

    types      kv.layout.KVLayout    the order of bytes of a page
               base.Region           memory that holds pages
               base.Exports          how a peer reaches it
    do         agent.TransferAgent   register, connect, submit page copies, be told when they are done
               peer                  the preflight of a link: prove and measure a route before it is used
    inside     copies, route, transports.*

The package can be used without the rest of slipstream; docs/transfer.md shows how.
"""
