"""The OpenAI-compatible HTTP server, health, metrics and the daemon's status page.

``app`` routes, ``body`` reads what a client asks for, ``generation`` runs it on the engine,
``reply`` writes the answer. The engine and the model are seen through the protocols in
``service``; nothing here imports torch.
"""
