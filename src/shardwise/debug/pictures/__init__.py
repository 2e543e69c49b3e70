"""Pictures of layouts, routes and meshes: characters and SVG."""
